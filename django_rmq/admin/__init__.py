"""RMQ in the Django admin: topics, their messages, and the actions of people on them.

A project's own ``AdminSite`` registers the same two: ``site.register(Topic, TopicAdmin)``.
"""

from django.contrib import admin

from django_rmq.admin.topic_admin import TopicAdmin
from django_rmq.models import Topic

admin.site.register(Topic, TopicAdmin)

__all__ = ["TopicAdmin"]

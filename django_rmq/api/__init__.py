"""REST: topics, messages and two-phase consumption for programs in any language.

    urlpatterns = [path("api/rmq/", include("django_rmq.api.urls")), ...]

A face like the admin and the commands: it translates requests and errors and decides nothing; ``django_rmq.operations``
does. Who asks, and how often they may, is found by the project's REST_FRAMEWORK; parsing, rendering and errors are our
own, so that nothing here depends on what else a project has set. ``docs/how-to/rest.md`` describes all routes.
"""

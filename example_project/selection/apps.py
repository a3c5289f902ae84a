from django.apps import AppConfig


class SelectionConfig(AppConfig):
    name = "example_project.selection"
    default_auto_field = "django.db.models.BigAutoField"

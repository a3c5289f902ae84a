from django.apps import AppConfig


class PricesConfig(AppConfig):
    name = "example_project.prices"
    default_auto_field = "django.db.models.BigAutoField"

from django.apps import AppConfig


class ProductSetsConfig(AppConfig):
    name = "example_project.product_sets"
    default_auto_field = "django.db.models.BigAutoField"

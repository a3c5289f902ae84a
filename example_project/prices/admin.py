from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from example_project.prices.changes import change_prices
from example_project.prices.models import Product, Shop


@admin.register(Shop)
class ShopAdmin(admin.ModelAdmin):
    list_display = ["name", "grade"]
    list_filter = ["grade"]
    search_fields = ["name"]


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ["sku", "name", "shop", "price", "rendered_price", "rendered_at", "photo", "stock"]
    list_filter = ["shop__grade", "photo"]
    list_select_related = ["shop"]
    search_fields = ["=sku", "name"]
    readonly_fields = ["price_version", "rendered_version", "rendered_price", "rendered_at", "image"]

    def get_readonly_fields(self, request: HttpRequest, obj: Product | None = None) -> list[str]:
        return [*self.readonly_fields, *(["sku"] if obj else [])]

    def save_model(self, request: HttpRequest, obj: Product, form: Any, change: bool) -> None:
        # Only what was edited: consumers write the other columns meanwhile.
        if not change:
            obj.save()
        elif edited := set(form.changed_data) - {"price"}:
            obj.save(update_fields=edited)
        if "price" in form.changed_data:
            change_prices([(obj.sku, obj.price)])

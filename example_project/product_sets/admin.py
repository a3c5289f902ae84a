from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from example_project.product_sets.models import BOUNDS, Batch, Item, Member, ProductSet
from example_project.product_sets.sets import delete_set, evaluate_all, save_set


@admin.register(ProductSet)
class ProductSetAdmin(admin.ModelAdmin):
    fields = ["name", "title_contains", *BOUNDS]
    list_display = ["name", "rule", "joined", "left"]
    search_fields = ["name"]
    actions = ["evaluate"]

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        to_delete, counts, needed, protected = super().get_deleted_objects(objs, request)
        # Nobody may delete members, but they go with their set.
        return to_delete, counts, set(needed) - {"member"}, protected

    def save_model(self, request: HttpRequest, obj: ProductSet, form: Any, change: bool) -> None:
        save_set(obj)

    def delete_model(self, request: HttpRequest, obj: ProductSet) -> None:
        delete_set(obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[ProductSet]) -> None:
        for product_set in queryset:
            delete_set(product_set)

    @admin.action(description="Evaluate all items again", permissions=["change"])
    def evaluate(self, request: HttpRequest, queryset: QuerySet[ProductSet]) -> None:
        sent = evaluate_all()
        self.message_user(
            request, f"{len(sent)} items will be evaluated again, for all sets.", messages.SUCCESS
        )


class ReadOnlyAdmin(admin.ModelAdmin):
    """Spark writes these rows; people only look at them."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission


@admin.register(Item)
class ItemAdmin(ReadOnlyAdmin):
    list_display = ["sku", "title", "price", "stock", "rating"]
    search_fields = ["=sku", "title"]


@admin.register(Member)
class MemberAdmin(ReadOnlyAdmin):
    list_display = ["item", "product_set", "since"]
    list_filter = ["product_set"]
    list_select_related = ["item", "product_set"]


@admin.register(Batch)
class BatchAdmin(ReadOnlyAdmin):
    list_display = ["work", "number", "at", "rows", "unusable"]
    list_filter = ["work"]

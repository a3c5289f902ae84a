from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.widgets import AdminTextareaWidget
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html

from example_project.selection.models import Batch, Change, Item, Label, Member, ProductSet
from example_project.selection.rules import NUMBERS, TEXTS, RuleError
from example_project.selection.sets import delete_set, evaluate_all, save_set


class ProductSetForm(forms.ModelForm):
    class Meta:
        model = ProductSet
        fields = ["name", "rule", "active", "starts_at", "ends_at"]
        widgets = {"rule": AdminTextareaWidget(attrs={"rows": 4, "spellcheck": "false"})}
        help_texts = {
            "rule": f"{', '.join(NUMBERS)}: = != &lt; &lt;= &gt; &gt;=, between 4 and 5, in (1, 2), is known. "
            f"{', '.join(TEXTS)}: = !=, in, contains, starts with, is known, and text in quotes. "
            "Joined by and, or, not and parentheses.<br>"
            '<code>price &lt; 20 and stock &gt;= 1 and (title contains "mug" or rating &gt;= 4.5)</code>'
        }


@admin.register(ProductSet)
class ProductSetAdmin(admin.ModelAdmin):
    form = ProductSetForm
    list_display = ["name", "rule", "when", "size", "joined", "left"]
    search_fields = ["name", "rule"]
    readonly_fields = ["size", "belonging", "joined", "left", "revision"]
    actions = ["evaluate"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[ProductSet]:
        return super().get_queryset(request).annotate(members_now=Count("members"))

    def get_fields(self, request: HttpRequest, obj: ProductSet | None = None) -> list[Any]:
        return [*ProductSetForm.Meta.fields, *(self.readonly_fields if obj else [])]

    @admin.display(description="members", ordering="members_now")
    def size(self, product_set: ProductSet) -> str:
        count: int = getattr(product_set, "members_now", 0)
        where = reverse("admin:selection_member_changelist")
        return format_html('<a href="{}?product_set__id__exact={}">{}</a>', where, product_set.pk, count)

    @admin.display(description="the saved rule holds for")
    def belonging(self, product_set: ProductSet) -> str:
        # A form with a mistake shows what was typed.
        saved = ProductSet.objects.get(pk=product_set.pk)
        try:
            rule = saved.parsed
        except RuleError as error:
            return str(error)
        holding = [rule.holds(item.facts) for item in Item.objects.all()]
        return f"{sum(holding)} of {len(holding)} items at this moment"

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        found, counts, needed, protected = super().get_deleted_objects(objs, request)
        # What is only looked at is nobody's to delete, but it goes with its set.
        return found, counts, set(needed) - {"member", "change", "label"}, protected

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
    """What Spark writes is looked at here, never edited."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Item)
class ItemAdmin(ReadOnlyAdmin):
    list_display = ["sku", "title", "price", "stock", "rating"]
    list_filter = ["sets"]
    search_fields = ["=sku", "title"]


@admin.register(Member)
class MemberAdmin(ReadOnlyAdmin):
    list_display = ["item", "product_set", "price", "stock", "rating", "joined"]
    list_filter = ["product_set"]
    list_select_related = ["item", "product_set"]
    search_fields = ["=item__sku", "item__title"]

    @admin.display(ordering="since")
    def joined(self, member: Member) -> str:
        return f"{member.since:%H:%M:%S}"

    @admin.display(ordering="item__price")
    def price(self, member: Member) -> Any:
        return member.item.price

    @admin.display(ordering="item__stock")
    def stock(self, member: Member) -> Any:
        return member.item.stock

    @admin.display(ordering="item__rating")
    def rating(self, member: Member) -> Any:
        return member.item.rating


@admin.register(Change)
class ChangeAdmin(ReadOnlyAdmin):
    list_display = ["at", "product_set", "item", "joined", "why", "labelled_at"]
    list_filter = ["product_set", "joined"]
    list_select_related = ["item", "product_set"]
    search_fields = ["=item__sku", "item__title"]


@admin.register(Label)
class LabelAdmin(ReadOnlyAdmin):
    list_display = ["item", "product_set"]
    list_filter = ["product_set"]
    list_select_related = ["item", "product_set"]


@admin.register(Batch)
class BatchAdmin(ReadOnlyAdmin):
    list_display = ["work", "number", "done_at", "rows", "unusable", "items", "joined", "left"]
    list_filter = ["work"]
    list_display_links = None

    @admin.display(ordering="at")
    def done_at(self, batch: Batch) -> str:
        return f"{batch.at:%H:%M:%S}"

from __future__ import annotations

from django.contrib import admin

from example_project.orders.models import DailyReport, Order


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = [
        "id",
        "product",
        "quantity",
        "total",
        "state",
        "created_at",
        "due_at",
        "closed_at",
        "lateness",
    ]
    list_filter = ["state"]
    list_select_related = ["product"]
    raw_id_fields = ["product"]
    date_hierarchy = "created_at"


@admin.register(DailyReport)
class DailyReportAdmin(admin.ModelAdmin):
    list_display = ["day", "orders", "paid", "closed", "revenue"]

from django.urls import path

from example_project.prices import views

urlpatterns = [
    path("", views.shop_front, name="shop-front"),
    path("products/<int:sku>/", views.product, name="product"),
]

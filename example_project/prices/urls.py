from django.urls import path

from example_project.prices import views

urlpatterns = [
    path("", views.shop_front, name="shop-front"),
    path("newest/", views.newest, name="newest"),
    path("products/<int:sku>/", views.product, name="product"),
    path("products/<int:sku>/image/", views.product_image, name="product-image"),
]

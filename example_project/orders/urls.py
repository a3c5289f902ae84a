from django.urls import path

from example_project.orders import views

urlpatterns = [
    path("", views.orders, name="orders"),
    path("new/<int:sku>/", views.create, name="order-create"),
    path("<int:pk>/", views.order, name="order"),
    path("<int:pk>/pay/", views.pay, name="order-pay"),
]

from django.urls import path

from example_project.orders import views

urlpatterns = [
    path("", views.orders, name="orders"),
    path("list/", views.order_list, name="order-list"),
    path("new/<int:sku>/", views.create, name="order-create"),
    path("<int:pk>/", views.order, name="order"),
    path("<int:pk>/state/", views.order_state, name="order-state"),
    path("<int:pk>/pay/", views.pay, name="order-pay"),
]

from django.urls import path

from example_project.product_sets import views

urlpatterns = [
    path("", views.sets, name="sets"),
    path("list/", views.set_list, name="set-list"),
]

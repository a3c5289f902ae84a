from django.urls import path

from example_project.product_sets import views

urlpatterns = [path("", views.sets, name="sets")]

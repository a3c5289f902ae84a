"""REST: topics, messages and two-phase consumption for programs in any language.

    urlpatterns = [path("api/rmq/", include("django_rmq.api.urls")), ...]

Like the admin and the commands, it only translates requests and errors; ``django_rmq.operations`` decides.
The project's REST_FRAMEWORK settings provide authentication, throttles and the browsable renderer. Parsing,
JSON and errors belong to this package, so they do not depend on the project's other settings. ``docs/how-to/rest.md``
describes all routes.
"""

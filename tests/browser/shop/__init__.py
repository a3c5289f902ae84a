"""The example shop with a few topics more, as the browser tests see it."""

THEMES = {
    "django": [],
    "unfold": ["unfold"],
    "jazzmin": ["jazzmin"],
    "grappelli": ["grappelli"],
    "admin-interface": ["admin_interface", "colorfield"],
}
"""Each theme of the admin that is tried, and its apps."""

"""The pages of the admin: each is a function that gets ``Pages``, the request, and the values in the address."""

"""The description of the routes in OpenAPI."""

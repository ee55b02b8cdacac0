"""Downloads: packages of the registries, the hub, and the cache that keeps them."""

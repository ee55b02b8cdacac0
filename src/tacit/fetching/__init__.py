"""Files from elsewhere: packages of the registries, the hub, and the cache where they are kept."""

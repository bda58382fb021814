"""Process groups: communicators, meshes, backends, the store, and what is kept with a group."""

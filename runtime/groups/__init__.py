"""Process groups: communicators, meshes, backends, the store, and objects kept with a group."""

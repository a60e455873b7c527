"""meshnet_node: a process that serves a shard of a model."""

"""The activation plane on real sockets."""

"""The subset of the API of etcd that the registry uses."""

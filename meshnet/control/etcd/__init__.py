"""A registry that replicas of the control plane share through etcd."""

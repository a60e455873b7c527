"""What hostile clients, networks, nodes and former operators are refused."""

"""meshnet_gateway: an OpenAI endpoint in front of the mesh."""

"""All that needs torch or transformers: shards, imports, the survey."""

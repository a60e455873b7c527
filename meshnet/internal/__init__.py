"""Generated code that is no part of the public schema."""

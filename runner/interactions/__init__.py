"""Permission requests: policy, then an answer or a durable question."""

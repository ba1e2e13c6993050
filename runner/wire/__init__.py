"""The HTTP contract: request models, event lines, problem documents, and the shapes of what is answered."""

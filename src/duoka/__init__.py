"""duoka puts a large language model on the GPUs that a person has."""

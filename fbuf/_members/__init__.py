"""Several members as one whole: the buffers of a mixture, the shards of a buffer, the shards of several processes."""

"""Where rounds run: the GPUs of this host, or nodes of a Ray cluster; and the jobs that are spread over them."""

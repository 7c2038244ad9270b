"""What everything else stands on, without torch: the nouns as data, statistics, GPUs, processes, untrusted input."""

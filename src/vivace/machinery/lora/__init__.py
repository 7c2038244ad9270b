"""LoRAs: where they are, what is in them, merged into weights, or beside layers and exchanged in place."""

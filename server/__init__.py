"""The draft server: RPC ⇄ engine ⇄ store, lifecycle, configuration, metrics, the command line."""

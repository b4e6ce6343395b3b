"""The network over hivemind's libp2p daemon and DHT: `transport.open_transport(config.NetworkConfig(...))`."""

"""What runs jobs: the dispatcher, the wire protocol, the model process and its runner."""

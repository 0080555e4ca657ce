"""Running jobs: the dispatcher, the contract of runners, the wire protocol, the model process and its runner."""

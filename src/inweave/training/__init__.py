"""From a dataset to an adapter. The rooms, in the order the data takes:

    config -> data -> adapters -> optim -> memory -> distributed -> output -> tasks -> checkpoint -> step -> loop -> session

A room only imports rooms before it.

`inweave.train(config)` is `session.train`.
"""

"""From a dataset to an adapter. The rooms, in the order the data takes:

    config -> data -> adapters -> optim -> memory -> tasks -> checkpoint -> output -> step -> loop -> session

`inweave.train(config)` is `session.train`.
"""

"""From a dataset to an adapter. The packages and modules, each importing only those before it:

    config -> importers -> data -> adapters -> optim -> execution -> memory -> distributed -> output -> tasks
           -> checkpoint -> step -> loop -> session

`inweave.train(config)` is `session.train`.
"""

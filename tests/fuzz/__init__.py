"""One fuzzer for all readers: `harness` runs and measures, `mutate` damages, `readers` lists what is read."""

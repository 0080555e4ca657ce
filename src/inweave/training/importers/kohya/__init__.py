"""kohya's sd-scripts, musubi-tuner and kohya_ss: command lines, TOML files, presets of the GUI."""

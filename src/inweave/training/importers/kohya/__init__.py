"""kohya's sd-scripts and kohya_ss: command lines, TOML files, presets of the GUI."""

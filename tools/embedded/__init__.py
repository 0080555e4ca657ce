"""The recipe of the embedded model: from openly licensed emoji art to the folder `src/inweave/models/emoji`.

    fetch -> render -> tokenizer -> train_vae -> train_unet -> train_decoder -> export -> evaluate
                  `-> styles -> train_styles,  reference

Every stage is `python -m tools.embedded.<stage>`; each stage reads the output of the previous ones in the work folder.
"""

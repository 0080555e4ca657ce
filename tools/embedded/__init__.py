"""The recipe of the embedded model: from openly licensed emoji art to the folder `src/inweave/models/emoji`.

    fetch -> render -> tokenizer -> train_vae -> train_unet -> train_decoder -> export -> evaluate
                  `-> styles -> train_styles,  reference

Every stage is `python -m tools.embedded.<stage>`; what one stage leaves under the work folder the next one reads.
"""

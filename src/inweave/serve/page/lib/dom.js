// Preact with htm's templates. Their values become text and properties, never markup: names of files cannot inject anything.
import {useState} from "../vendor/preact.js"

export {html, render, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState} from "../vendor/preact.js"

let ids = 0

/** An id for an element of this component. @returns {string} */
export const useId = () => useState(() => `id-${++ids}`)[0]

/** Joins class names. @param {...(string | false | null | undefined)} names */
export const cx = (...names) => names.filter(Boolean).join(" ")

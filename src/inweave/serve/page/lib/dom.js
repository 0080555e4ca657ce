// The rendering layer in one import: Preact's components and hooks, with htm's templates instead of JSX.
//
//   const Hello = ({ name }) => html`<p class="muted">Hello ${name}</p>`;
//
// Values in templates become text nodes and properties, never markup: names from files cannot inject anything.
import {useState} from "../vendor/preact.js"

export {html, render, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState} from "../vendor/preact.js"

let ids = 0

/** An id for an element of this component, to be named by others. @returns {string} */
export const useId = () => useState(() => `id-${++ids}`)[0]

/** Class names of what is true. @param {...(string | false | null | undefined)} names */
export const cx = (...names) => names.filter(Boolean).join(" ")

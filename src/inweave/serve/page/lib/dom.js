// The rendering layer in one import: Preact's components and hooks, with htm's templates instead of JSX.
//
//   const Hello = ({ name }) => html`<p class="muted">Hello ${name}</p>`;
//
// Values in templates become text nodes and properties, never markup: names from files cannot inject anything.
import htm from "../vendor/htm.js";
import { h } from "../vendor/preact.js";

export {
	useCallback,
	useContext,
	useEffect,
	useId,
	useLayoutEffect,
	useMemo,
	useReducer,
	useRef,
	useState,
} from "../vendor/hooks.js";
export { createContext, createPortal, Fragment, h, render } from "../vendor/preact.js";
export const html = htm.bind(h);

/**
 * Class names of what is true.
 * @param {...(string | false | null | undefined)} names
 */
export const cx = (...names) => names.filter(Boolean).join(" ");

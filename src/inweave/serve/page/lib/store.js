// A store is a plain object behind get, set and subscribe; components read a part of it with useStore.
import { useLayoutEffect, useReducer, useRef } from "./dom.js";

/**
 * @template {object} T
 * @param {T} initial
 * @returns {Store<T>}
 */
export function createStore(initial) {
	let state = initial;
	/** @type {Set<() => void>} */
	const listeners = new Set();
	return {
		get: () => state,
		set(patch) {
			state = { ...state, ...(typeof patch === "function" ? patch(state) : patch) };
			for (const listener of [...listeners]) listener();
		},
		subscribe(listener) {
			listeners.add(listener);
			return () => listeners.delete(listener);
		},
	};
}

/**
 * The selected part of a store; the component renders again when it is another value (`Object.is`), so select fields as
 * they are and compute from them afterwards.
 * @template T, V
 * @param {Store<T>} store
 * @param {(state: T) => V} select
 * @returns {V}
 */
export function useStore(store, select) {
	const [, update] = useReducer((/** @type {number} */ n) => n + 1, 0);
	const value = select(store.get());
	const current = useRef({ value, select });
	current.current = { value, select };
	useLayoutEffect(() => {
		const check = () => {
			if (!Object.is(current.current.select(store.get()), current.current.value)) update(undefined);
		};
		check(); // it may have changed between rendering and now
		return store.subscribe(check);
	}, [store]);
	return value;
}

/**
 * A value that outlives the page: JSON in localStorage. Private windows may refuse it; then it lives as long as the page.
 * @template T
 * @param {string} name
 * @param {T} initial
 */
export function persisted(name, initial) {
	const key = `inweave.${name}`;
	return {
		/** @returns {T} */
		read() {
			try {
				const text = localStorage.getItem(key);
				return text === null ? initial : JSON.parse(text);
			} catch {
				return initial;
			}
		},
		/** @param {T} value */
		write(value) {
			try {
				localStorage.setItem(key, JSON.stringify(value));
			} catch {
				// full or forbidden: nothing depends on it
			}
		},
	};
}

// A store is a plain object behind get, set and subscribe; components read a part of it with useStore.
import {useLayoutEffect, useReducer, useRef} from "./dom.js"

/** @template {object} T @param {T} initial @returns {Store<T>} */
export function createStore(initial) {
	let state = initial
	/** @type {Set<() => void>} */
	const listeners = new Set()
	return {
		get: () => state,
		set(patch) {
			state = {...state, ...(typeof patch === "function" ? patch(state) : patch)}
			for (const listener of [...listeners]) listener()
		},
		subscribe(listener) {
			listeners.add(listener)
			return () => listeners.delete(listener)
		}
	}
}

/**
 * The fields of a store. The component renders again when a field that it read changes: destructure them.
 * @template {object} T @param {Store<T>} store @returns {T}
 */
export function useStore(store) {
	const [, update] = useReducer(n => n + 1, 0)
	const reads = useRef(/** @type {Map<any, any>} */ (new Map()))
	const now = new Map()
	reads.current = now
	useLayoutEffect(() => {
		const check = () => {
			const state = /** @type {any} */ (store.get())
			if ([...reads.current].some(([name, value]) => !Object.is(state[name], value))) update(undefined)
		}
		check() // it may have changed between rendering and now
		return store.subscribe(check)
	}, [store])
	/** @param {any} state @param {PropertyKey} name */
	const get = (state, name) => {
		now.set(name, state[name])
		return state[name]
	}
	return new Proxy(store.get(), {get})
}

/**
 * A value in localStorage, as JSON. Private windows may refuse it; then it lasts as long as the page.
 * @template T @param {string} name @param {T} initial
 */
export function persisted(name, initial) {
	const key = `inweave.${name}`
	return {
		/** @returns {T} */
		read() {
			try {
				const text = localStorage.getItem(key)
				return text === null ? initial : JSON.parse(text)
			} catch {
				return initial
			}
		},
		/** @param {T} value */
		write(value) {
			try {
				localStorage.setItem(key, JSON.stringify(value))
			} catch {
				// full or forbidden: nothing depends on it
			}
		}
	}
}

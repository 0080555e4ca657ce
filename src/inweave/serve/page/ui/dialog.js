import {html, useEffect, useId, useRef} from "../lib/dom.js"
import {texts} from "../strings.js"
import {Button} from "./button.js"

/** A modal dialog. @param {DialogProps} props */
export function Dialog({title, onClose, children, actions, wide}) {
	const ref = useRef(/** @type {HTMLDialogElement | null} */ (null))
	const id = useId()
	useEffect(() => {
		const dialog = ref.current
		dialog?.showModal()
		return () => dialog?.close()
	}, [])
	return html`<dialog
		ref=${ref}
		class=${wide ? "dialog dialog-wide" : "dialog"}
		aria-labelledby=${id}
		onCancel=${event => {
			event.preventDefault()
			onClose()
		}}
		onClick=${event => event.target === ref.current && onClose()}
	>
		<div class="dialog-body">
			<header class="row spread">
				<h2 id=${id}>${title}</h2>
				<${Button} kind="quiet" icon="close" label=${texts.actions.close} onClick=${onClose} />
			</header>
			${children} ${actions && html`<footer class="dialog-actions">${actions}</footer>`}
		</div>
	</dialog>`
}

/** @param {ConfirmProps} props */
export const Confirm = ({title, text, confirm, onConfirm, onClose}) => html`<${Dialog}
	title=${title}
	onClose=${onClose}
	actions=${html`<${Button} onClick=${onClose}>${texts.actions.cancel}<//>
		<${Button}
			kind="danger"
			autofocus
			onClick=${() => {
				onClose()
				onConfirm()
			}}
			>${confirm}<//
		>`}
>
	<p>${text}</p>
<//>`

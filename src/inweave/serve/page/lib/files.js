// Image bytes, encoded for requests.

/** A file in base64. @param {Blob} file @returns {Promise<string>} */
export const toBase64 = file =>
	new Promise((resolve, reject) => {
		const reader = new FileReader()
		reader.onload = () => resolve(String(reader.result).replace(/^data:[^,]*,/, ""))
		reader.onerror = () => reject(reader.error)
		reader.readAsDataURL(file)
	})

/** @param {HTMLCanvasElement} canvas @returns {Promise<Blob>} */
export const toPng = canvas =>
	new Promise((resolve, reject) =>
		canvas.toBlob(blob => (blob ? resolve(blob) : reject(new Error("no memory for a PNG"))), "image/png")
	)
